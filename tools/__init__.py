"""Developers' scripts; nothing imports them, except tests."""
