"""First scenario of a user: description of a table, advice on settings, and a folder to start from.

`inspect_table` describes a table, `advise` recommends settings for public facts, and `create_folder` writes one.

Imports: the core.
"""
