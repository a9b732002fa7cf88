"""Add-ons: optional rooms, which the core imports by name only.

An add-on is a file or a folder, and provides commands, models, metrics, engines, readers of data, or parts of
guards and reports.  `fedpriv.core.extensions` lists the parts of add-ons.  The command line imports the modules
that add commands when it starts, and every other part is imported when it is first used.

Imports: everything in the core.  Add-ons do not import each other, except that `audit` imports `statistics`.
"""
