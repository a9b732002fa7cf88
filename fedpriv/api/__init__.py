"""Running and reading from Python; `import fedpriv` offers all of it."""
