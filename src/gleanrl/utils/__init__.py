"""Small tools that every other package of Glean RL may import. They import nothing from the other packages."""
