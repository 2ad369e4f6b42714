"""Where solves may begin: few points, copies, graphs, guesses; and how starts are told apart."""
