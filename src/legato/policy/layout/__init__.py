"""How rows of text become one sequence of tokens, and what each token may attend to."""
