"""What a run leaves behind: results files, tables, plots."""
