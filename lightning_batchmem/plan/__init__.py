"""Pure arithmetic: trials and limits come in; the next size, the chosen size or the plan goes out.

Besides the standard library, only rich is imported here, where texts and tables are printed.
"""
