"""Showing it: trace export, plots, HTML, terminal progress. Reads files and timelines; never imports
runtime."""
