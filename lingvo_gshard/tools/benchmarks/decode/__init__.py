"""gshard-bench decode: the speed of decoding beside that of other engines."""
