"""Distinct integer types for the numbers that are easiest to mix up."""

from typing import NewType

RequestId = NewType("RequestId", int)
"""Names one request for its whole life; never reused within an engine."""

SlotId = NewType("SlotId", int)
"""Row of every bounded pool (rings, recurrent state). 0 is the sink."""

PointId = NewType("PointId", int)
"""Resume point; they are counted from 0, as there is no sink among them."""

PageId = NewType("PageId", int)
"""Page of every paged pool. 0 is the sink."""

SINK_PAGE = PageId(0)
SINK_SLOT = SlotId(0)
