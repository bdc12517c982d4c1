"""What a person reads of a run: `tables` (plain text) and `plots` (figures, needs matplotlib).

Reports only read. They are given layouts, byte counts and losses, and import no step.
"""
