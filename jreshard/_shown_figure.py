"""A figure that notebooks show. Imports matplotlib, which is optional."""

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that shows itself in a notebook, also where pyplot was never imported.

    IPython learns how to show matplotlib's figures only when pyplot is imported; it then prefers what it has learnt.
    """

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()
