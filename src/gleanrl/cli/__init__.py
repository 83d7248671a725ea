"""The command line `gleanrl`. Each of its commands (`train`, `evaluate`, ...) is a module of this package."""
