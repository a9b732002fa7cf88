"""A run's tables as a piece of HTML: what a notebook shows for results."""

from jinja2 import Environment, StrictUndefined

from fedpriv.reports.notes import caveats_of, how_measured
from fedpriv.reports.summary import state_of
from fedpriv.reports.table import tables_of
from fedpriv.sweep.results import Results

_PIECE = """\
<div>
<p><strong>{{ title }}</strong>{% if state %} · {{ state }}{% endif %}</p>
{% for table in tables %}
{% if table.caption %}<p>{{ table.caption }}</p>{% endif %}
<table>
<thead><tr>{% for head in table.header %}<th>{{ head }}\
{% if loop.first and table.across %} \\ {{ table.across }}{% endif %}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.body %}
<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
{% for line in caveats %}
<p>{{ line }}</p>
{% endfor %}
<p><small>{{ measured }}</small></p>
</div>
"""


def fragment_of(results: Results) -> str:
    """The tables and how they were measured; everything that comes from a scenario is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PIECE).render(
        title=results.title or results.name,
        state=state_of(results),
        tables=tables_of(results),
        caveats=caveats_of(results.cells),
        measured=how_measured(results),
    )
