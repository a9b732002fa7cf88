"""Charts of the report page: SVG that needs nothing else, with numbers that a script shows under the pointer."""
