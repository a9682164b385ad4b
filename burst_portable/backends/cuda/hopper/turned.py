"""Shared memory in which eight rows at a time lie in another order, so that dQ is written without bank conflicts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def turned_rows(rows, columns, bits):
    """A layout of lines of 128 bytes, swizzled as TMA has it, of [rows, columns] elements of 16 or 32 bits.

    A warp writes float32 accumulators by half warps of four rows, and of each row 32 bytes. Rows 0 and 1 of the swizzle
    meet in the same banks, and so do 2 and 3; but 0, 2, 4 and 6 do not. So dS (16 bits) is written with its queries in
    the order 0 2 4 6 1 3 5 7, its product dQ comes out in this order, and is written (32 bits) to where they belong::

        line of dS      0 1 2 3 4 5 6 7          row of the product    0 1 2 3 4 5 6 7
        holds query     0 2 4 6 1 3 5 7          goes to line          0 2 4 6 1 3 5 7
    """
    line, chunk = 1024 // bits, 128 // bits  # elements of a line, and of the 16 bytes that the swizzle moves
    order = [2, 4, 1] if bits == 16 else [4, 1, 2]  # where lines 1, 2 and 4 are
    bases = [[0, 1 << i] for i in range(min(line, columns).bit_length() - 1)]
    bases += [[row, chunk << i] for i, row in enumerate(order)]
    bases += [[8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    bases += [[0, line << i] for i in range((columns // line).bit_length() - 1)]
    return gl.SharedLinearLayout(offset_bases=bases, alignment=1024)
