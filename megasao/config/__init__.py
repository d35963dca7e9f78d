"""Typed, strict configuration; importable without torch."""

from megasao.config.root import Config

__all__ = ["Config"]
