"""Pure arithmetic: trials and limits come in; the next size, the chosen size or the plan goes out.

Only the standard library is imported here.
"""
