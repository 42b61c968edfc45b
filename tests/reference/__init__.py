"""The objectives a second time: slow loops over plain Python floats, from the papers, importing nothing of ours.

Each function gives a loss and, by hand from the coefficient field of the member, its gradient with respect to the new
log-probs. Nothing here is fast, vectorised or shared with the package: agreement is the proof.
"""
