"""For those who write the course or hand it out: chapters, the book, the bank, a learner's copy."""

import sys

# With it jsonschema, which nbformat imports, builds a grammar of addresses: over a second, and of no use here.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
