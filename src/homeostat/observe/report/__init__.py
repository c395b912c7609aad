"""Write report.html: one self-contained page about a run, from the files of its directory."""

from homeostat.observe.report.page import write_report

__all__ = ["write_report"]
