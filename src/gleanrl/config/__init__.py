"""Defines the settings of a run (`settings`), reads them from files and arguments (`loading`), and checks them."""
