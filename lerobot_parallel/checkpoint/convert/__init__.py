"""DCP shards to weights files and back: offline, one process, no GPU, in constant memory."""

from lerobot_parallel.checkpoint.convert.merge import ConvertResult, WrittenFile, convert
from lerobot_parallel.checkpoint.convert.shard import ShardResult, to_dcp
from lerobot_parallel.checkpoint.convert.source import Source, find_source

__all__ = ["ConvertResult", "ShardResult", "Source", "WrittenFile", "convert", "find_source", "to_dcp"]
