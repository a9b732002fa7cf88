"""Records and modules in the forms of other programs, as the arrays, tables and modules of the core.

`read_items` reads data sets of items, `read_parts` those that are split by silo, `register_frame` DataFrames, and
`read_text` files of tables.  `prepare_module` takes wrappers off a module, and `complete_federation` lets a
scenario follow the records.

Imports: the core.
"""
