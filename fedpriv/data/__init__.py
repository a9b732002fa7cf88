"""Data sets: fetched, described, encoded and spread over silos.

`TableSchema` describes a table in public.  `load` loads a data set, and `FeatureLayout` describes the features of
one record in a flat row.

Imports: rooms from `participation` down.
"""
