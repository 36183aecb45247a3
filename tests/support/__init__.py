"""What the tests stand on: cheap worlds of processes, real commands, small data and a nasty policy."""
