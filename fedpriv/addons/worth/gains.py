"""The chart of `fedpriv worth`: the gain over each silo alone against ε, for the two pens of all charts."""

from dataclasses import replace

from fedpriv.addons.worth.break_even import error_words, estimate
from fedpriv.addons.worth.joining import Joining
from fedpriv.core.figures import counted, delta_figure, upper_figure
from fedpriv.noise.trust import trust_named
from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import nth_look, shade


def gain_chart(found: Joining) -> Chart:
    """The gain over each silo alone against ε: a line a trust setting with its standard error, and zero."""
    grid, scale = found.question.epsilons, 100.0 if found.metric == "accuracy" else 1.0
    ends = [Mark(epsilon, 0.0, "gain 0") for epsilon in (grid[0], grid[-1])]
    series = [Series("each silo alone", replace(shade(5), dash=1), ends, dots=False)]
    for place, trust in enumerate(found.trusts):
        marks = []
        for epsilon, values in zip(grid, found.along(trust), strict=True):
            told = estimate(values, found.ratio)
            error = scale * (told.error or 0.0)
            spread = f" ± {error_words(error, 1)}" if error else ", no standard error"
            tip = f"ε = {upper_figure(epsilon, 3)}: {scale * told.mean:+.1f}{spread}"
            marks.append(Mark(epsilon, scale * told.mean, tip, error))
        series.append(Series(trust_named(trust).title, nth_look(place), marks))
    several = len(found.splits) > 1
    splits = f"mean over {len(found.splits)} splits ± s.e." if several else "one split, no standard error"
    delta, seeds = delta_figure(found.delta), found.question.seeds
    note = f"{splits}, {counted(seeds, 'noise seed')} each"
    note += f"; ε is against the server, δ\u00a0=\u00a0{delta}."
    y = "gain over each silo alone (points)" if scale > 1.0 else "gain over each silo alone"
    caption = f"Is it worth joining? {found.name}, {found.silos} silos"
    return Chart("worth", caption, "ε", y, [Panel("", series)], note, log_x=True, ticks=grid)
