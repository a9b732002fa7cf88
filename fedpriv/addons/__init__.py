"""Add-ons: rooms that the core never imports.

An add-on gives commands, models, metrics or engines.  `fedpriv.core.extensions` names them, and imports one when
it is named.

Imports: everything in the core; of other add-ons, `audit` imports `statistics` alone.
"""
