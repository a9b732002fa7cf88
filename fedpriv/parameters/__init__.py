"""What the papers' theorems say about parameters, as pure functions of public numbers; one file a paper."""
