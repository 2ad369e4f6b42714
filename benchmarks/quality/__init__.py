"""Does a solver find the right optimum? Problems with known answers, ours beside the peers."""
