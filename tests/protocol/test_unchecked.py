"""Containers past Flower's checks are those that its constructors make: this fails when Flower changes."""

import time
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedpriv.protocol.messages import (
    build_array,
    build_message,
    build_messages,
    build_record,
    build_reply,
    copy_content,
    set_message_id,
)

pytestmark = pytest.mark.usefixtures("flower_task")


def array_of_three() -> Array:
    return Array(np.arange(3.0))


def have_the_same_fields(made: object, checked: object) -> bool:
    """Whether nothing that the constructor sets is missing."""
    return made.__dict__.keys() == checked.__dict__.keys()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ArrayRecord, {"vector": array_of_three()}),
        (ConfigRecord, {"t": 3, "keys": b"k"}),
        (MetricRecord, {"drawn": 1}),
        (RecordDict, {"metrics": MetricRecord({"drawn": 1}), "release": ArrayRecord({"v": array_of_three()})}),
    ],
)
def test_a_record_built_without_checks_equals_that_of_the_flower_constructor(
    kind: type[Any], values: dict[str, Any]
) -> None:
    checked = kind(values)
    made, other = build_record(kind, values), build_record(kind, {})
    assert made == checked
    assert type(made) is kind
    assert len(other) == 0
    assert made.object_id == checked.object_id, "it travels as the same bytes"
    assert have_the_same_fields(made, checked)
    with pytest.raises(TypeError):  # whoever changes it later is checked
        made["other"] = object()


def test_an_array_built_without_checks_equals_that_of_the_flower_constructor() -> None:
    checked = array_of_three()
    made = build_array(checked.dtype, checked.shape, checked.stype, checked.data)
    assert np.array_equal(made.numpy(), checked.numpy())
    assert made.object_id == checked.object_id
    assert have_the_same_fields(made, checked)


def asked() -> Message:
    content = RecordDict({"query": ArrayRecord({"v": array_of_three()}), "config": ConfigRecord({"t": 1})})
    message = Message(content, 7, "train", group_id="group", ttl=50.0, dst_task_id=5)
    set_message_id(message, "m1")
    assert message.metadata.message_id == "m1"
    return message


def test_a_reply_built_without_checks_equals_that_of_the_flower_constructor() -> None:
    message, content = asked(), RecordDict({"metrics": MetricRecord({"drawn": 1})})
    checked, made = Message(content, reply_to=message), build_reply(message, content)
    assert made.content is content
    assert not made.has_error()
    assert have_the_same_fields(made, checked)
    theirs, ours = (dict(each.metadata.__dict__) for each in (checked, made))
    assert abs(made.metadata.created_at - time.time()) < 5.0
    ends = [each.pop("_created_at") + each.pop("_ttl") for each in (theirs, ours)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)
    assert ours == theirs
    assert ours["_reply_to_message_id"] == "m1"
    assert ours["_dst_node_id"] == message.metadata.src_node_id
    assert message.metadata.message_id == "m1", "the question is as it was"


def test_messages_to_several_nodes_share_content_but_not_metadata() -> None:
    content = asked().content
    made = build_messages([7, 9], content, "train")
    for message, node in zip(made, (7, 9), strict=True):
        checked = Message(content, node, "train")
        assert message.content is content
        assert have_the_same_fields(message, checked)
        theirs, ours = (dict(each.metadata.__dict__) for each in (checked, message))
        assert abs(theirs.pop("_created_at") - ours.pop("_created_at")) < 5.0
        assert ours == theirs
    set_message_id(made[0], "m1")
    assert made[1].metadata.message_id == "", "each has its own metadata"
    assert build_messages([], content, "train") == []


def test_a_message_rebuilt_from_its_metadata_and_content_equals_the_original() -> None:
    message = asked()
    made = build_message(message.metadata, message.content)
    assert made.__dict__ == message.__dict__
    assert made.object_id == message.object_id


def test_a_copied_record_shares_array_bytes_but_not_its_structure() -> None:
    content = asked().content
    copied = copy_content(content)
    assert copied == content
    assert copied["query"]["v"] is content["query"]["v"]
    copied["config"]["t"] = 9
    copied["query"]["w"] = array_of_three()
    del copied["config"]
    assert content["config"]["t"] == 1
    assert len(content["query"]) == 1
