"""First steps with fedpriv from Python, in cells as notebooks have them (`# %%`); runs in seconds, offline."""

# %% A scenario is a file or, as here, the same as nested dictionaries.
import fedpriv

scenario = {
    "name": "first-steps",
    "title": "DP-FTRL with twenty silos, one pass, three levels of privacy",
    "data": {"name": "synthetic"},
    "federation": {"silos": 20, "rounds": 300},
    "algorithm": {"name": "dp-ftrl", "trust": "untrusted", "clip": 5.0, "step": 0.02, "radius": 10.0},
    "privacy": {"relation": "replace-one", "mu": 4.0, "delta": 1e-5},
    "sweep": {"privacy.mu": [1.0, 4.0, 16.0], "seeds": 3},
}

# %% Run it: every cell of the sweep, written to runs/first-steps as it goes.
results = fedpriv.run(scenario)
print(results.table())

# %% What came out, as plain frozen objects.
for cell in results.cells:
    privacy = cell.privacy
    print(
        f"mu {privacy.mu:g}, seed {cell.seed}: accuracy {cell.test_accuracy:.1%}, "
        f"epsilon {privacy.epsilon:.2f} at delta {privacy.delta:g} ({privacy.unit}, {privacy.relation})"
    )

# %% The same with a trusted server: override any key by its dotted name.
trusted = fedpriv.run(scenario, set={"algorithm.trust": "trusted", "privacy.mu": 4.0})
print(trusted.table())

# %% What would other noise mechanisms cost for the same guarantee?  Accounting needs no run.
from fedpriv.study.setting import AccountingSetting  # noqa: E402 - a notebook imports where it needs

for name, cost in AccountingSetting(rounds=300, silos=20).compare_mechanisms(mu=4.0).items():
    print(
        f"{name:12}  noise in a release {cost.error_rms:6.2f}   in the mean of 20 silos {cost.error_in_mean:6.2f}"
    )

# %% Pictures, and one HTML file for somebody else.
for path in results.plot():
    print(path)
print(results.report())
