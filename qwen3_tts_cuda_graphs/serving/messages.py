"""Messages between the server and a worker, over a Unix socket: a JSON header and raw bytes, each with its length.

    4 bytes: length of the header | 4 bytes: length of the payload | header | payload

    server -> worker                                        worker -> server
    load      the model; voices from files come with it     loaded    the weights are there
    begin     with how many rows                            ready     device, rows, sample rate
    speak     a text, or its first words, in a voice        audio     samples as int16
    text      more of it; null: there is no more            end       of a call: all of it was sent
    read      so many chunks have been read                 error     of a call: as a client is told
    voice     keep the voice of a recording                 beat      it is alive; its memory
    forget    voices that were removed                      draining  it was sent SIGTERM
    count     the tokens of a text                          stopped   why it ends itself
    split     a text into parts that fit into a row
    cancel    nobody listens any more
    stay      the server drains: go on, whoever sends SIGTERM

Everything but `load`, `begin`, `forget` and `stay` has the `id` of its call, and so has what answers it.
"""

import json
import struct
from collections.abc import Iterator

LENGTHS = struct.Struct("<II")
MAX_BYTES = 1 << 28  # of a part; the largest is a recording of a client

Message = tuple[dict, bytes]


def pack(header: dict, payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(payload)) + head + payload


class Unpacker:
    """Bytes as they come -> messages."""

    def __init__(self):
        self.data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self.data += data
        start = 0
        while len(self.data) - start >= LENGTHS.size:
            head, payload = LENGTHS.unpack_from(self.data, start)
            if max(head, payload) > MAX_BYTES:
                raise ValueError(f"a message of {head} + {payload} bytes")
            middle = start + LENGTHS.size + head
            if len(self.data) < middle + payload:
                break
            header = json.loads(self.data[start + LENGTHS.size : middle])
            start = middle + payload
            yield header, bytes(self.data[middle:start])
        del self.data[:start]
