"""Buckets, flows, payload formats, search spaces and settings: what every other room builds on."""

from lightning_gc.core.bucket import Bucket as Bucket
from lightning_gc.core.flow import Exchange as Exchange
from lightning_gc.core.flow import Flow as Flow
from lightning_gc.core.flow import Gather as Gather
from lightning_gc.core.flow import Limits as Limits
from lightning_gc.core.flow import Mean as Mean
from lightning_gc.core.flow import Payload as Payload
from lightning_gc.core.flow import Reply as Reply
from lightning_gc.core.flow import Request as Request
from lightning_gc.core.flow import together as together
from lightning_gc.core.search_space import Choice as Choice
from lightning_gc.core.search_space import Range as Range
from lightning_gc.core.search_space import Space as Space
from lightning_gc.core.settings import Settings as Settings
from lightning_gc.core.wire import Field as Field
from lightning_gc.core.wire import Wire as Wire
