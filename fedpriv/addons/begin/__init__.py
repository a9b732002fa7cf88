"""From nothing to a scenario: what is in a table, which settings fit, and a folder to start from.

`inspect_table` describes a table, `advise` chooses a row and its numbers, and `create_folder` writes a folder.

Imports: the core.
"""
