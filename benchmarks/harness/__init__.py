"""Problems, runners, one evaluator and one report for every benchmark."""
