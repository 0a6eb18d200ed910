"""Measurements behind the claims of the documents, a folder per subject; `python -m benchmarks NAME` runs one.

`bench.py` of a subject has `NOTE`, what to expect of a run as text, `TABLES`, the columns that are shown, and
`measure`. Its parameters are the options of the command, such as `num_runs` timed rounds and `only` cases by name, and
others that make it small. `on_progress` gets a text of what is being measured and, where known, the share that is
done. It returns the report, ready for JSON: rows under the keys of `TABLES`, the "environment" and the text of "notes".
It raises InputError for fewer than one run, an unknown name and missing data, and MissingExtraError where a host is not
installed.
"""
