"""Reference implementations of the objectives: slow loops over Python floats, written from the papers, without our code.

Each function returns a loss and its gradient with respect to the new log-probs, derived by hand from the coefficients of the
member. Nothing here is vectorised or shared with the package, so agreement between the two is the proof.
"""
