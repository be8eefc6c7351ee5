"""The decorator of the small classes that are made anew in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["state_class"]

if TYPE_CHECKING:
    from dataclasses import dataclass as state_class
else:
    from dataclasses import dataclass

    def state_class(
        *, frozen: bool, slots: bool = False, kw_only: bool = False
    ) -> Callable[[type[Any]], type[Any]]:
        """Return `dataclass` for a class that nobody changes; type checkers hold all to that.

        Python sets the fields of a frozen class one by one through `object.__setattr__`, which
        takes 0.17 us each (Python 3.11; 0.01 us otherwise), and a step makes dozens of such
        objects. So at run time the class is not frozen; it can be hashed all the same.

        Args:
            frozen: Always true.
            slots: As for `dataclass`.
            kw_only: As for `dataclass`.
        """
        if not frozen:
            raise TypeError("a state_class must be frozen.")
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)
