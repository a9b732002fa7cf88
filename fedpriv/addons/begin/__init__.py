"""From nothing to a scenario: what is in a table, which settings fit, and a folder to start from.

`inspect` reads a table, `advise` chooses a row and its numbers, and `start_folder` writes files.

Imports: the core.
"""
