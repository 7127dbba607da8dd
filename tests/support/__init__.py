"""What tests of several folders share. Each module says what it is for."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""
