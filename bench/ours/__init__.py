"""Our side of each benchmark: scripts that do the work through the package's job objects and print one JSON line."""
