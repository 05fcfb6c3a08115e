"""Tests over several rooms."""
