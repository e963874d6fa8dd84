"""Plain frozen data that crosses the rooms of the server and, as msgspec structs, its wire. No torch, no behaviour."""
