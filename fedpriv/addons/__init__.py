"""Add-ons: rooms that the core never imports.

An add-on is a file or a folder, and provides commands, models, metrics or engines.  `fedpriv.core.extensions`
lists the add-ons, and imports an add-on when a command or a scenario names one of its parts.

Imports: everything in the core.  Add-ons do not import each other, except that `audit` imports `statistics`.
"""
