"""What a step does and what a run needs, for a person to read and a test to assert.

  the audit    `hlo`: every collective of a compiled step, its bytes on the wire, and what hides it
  tables       `plan_table` and `doctor_table` for a terminal, `tables` plain text
  pictures     `page` (one HTML file) and `plots` (figures, needs matplotlib)

Reports only read. They are given layouts, plans, losses and compiled steps, and import no step.
"""
