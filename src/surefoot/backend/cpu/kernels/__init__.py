"""Loops over rows, compiled: what a library of whole-tensor operators can only do in many calls.

Each loop computes one row after the other, in an order that depends on the row alone. So a row's
bits cannot depend on the rows beside it or on how the work was cut.
"""
