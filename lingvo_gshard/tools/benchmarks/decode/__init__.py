"""gshard-bench decode: compares our speed of decoding with other engines' speed."""
