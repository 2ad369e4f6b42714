"""Everything that comes from or goes to the outside world: arrays, graphs, files, the console."""
