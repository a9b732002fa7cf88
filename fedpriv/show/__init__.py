"""Display of results: tables, charts, the page of a run, and its privacy statement.

`render_tables` makes tables, `plot_run` draws charts, and `write_report` writes the page.

Imports: rooms from `study` down.
"""
