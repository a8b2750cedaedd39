"""Reads a form with a file (multipart/form-data) as it arrives."""

from __future__ import annotations

from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from disagg.api.refusals import UnsupportedMediaType, invalid_value, missing_parameter

MAX_FIELD_NBYTES = 4096  # of what is no file


class Form:
    """A form whose field `file` is written to `target`, and others are kept.

    Attributes:
        fields: the texts of the others.
        filename: the name that the client gives the file; None without a file.

    Raises:
        UnsupportedMediaType: it is no form.
    """

    def __init__(self, content_type: bytes, target: BinaryIO) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise UnsupportedMediaType("Send the file with Content-Type: multipart/form-data.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._target = target
        self._header: list[bytes] = [b"", b""]  # name and value of the one that is read
        self._disposition = b""
        self._text: bytearray | None = None  # of the field that is read; None: it is the file
        self._name = ""
        self._has_ended = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_header_begin": self._begin_header,
                "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def write(self, part: bytes) -> None:
        """Read the next part of the body. Raises `InvalidRequest`."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise invalid_value("file", f"the form is not valid: {error}.") from None

    def check(self) -> str:
        """The file's name, when the body has been read. Raises `InvalidRequest`."""
        if self.filename is None:
            raise missing_parameter("file")
        if not self._has_ended:
            raise invalid_value("file", "the form ends before its last boundary.")
        return self.filename

    def _begin_header(self) -> None:
        self._header = [b"", b""]

    def _add(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._text = None if self._name == "file" else bytearray()
        if self._text is None:
            if self.filename is not None:
                raise invalid_value("file", "there are two.")
            name = options.get(b"filename", b"") or b"batch.jsonl"
            self.filename = name.decode(errors="replace")[:256]

    def _take(self, data: bytes) -> None:
        if self._text is None:
            self._target.write(data)
        elif len(self._text) + len(data) > MAX_FIELD_NBYTES:
            raise invalid_value(
                self._name[:64], f"it has more than {MAX_FIELD_NBYTES} bytes, and is not the file."
            )
        else:
            self._text += data

    def _end_part(self) -> None:
        if self._text is not None and len(self.fields) < 16:
            self.fields[self._name[:64]] = self._text.decode(errors="replace")

    def _end(self) -> None:
        self._has_ended = True
