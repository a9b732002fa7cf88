"""Data sets: fetched, described, encoded and spread over silos.

`TableSchema` describes a table in public.  `load` loads a data set, and `Layout` says how a record lies in
one row.

Imports: rooms from `participation` down.
"""
