# tests: tasks/task.py, tasks/token_task.py, tasks/translation.py, wings/inference/model_facts.py
"""Tests the token counts of a batch, and how vocabulary sizes reach a task's Params."""

import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.tasks import LanguageModelTask, Task, TranslationTask
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.step import FORWARD_AND_BACKWARD, step_flops
from tests import tiny
from tests.runtime import tiny_translation


class TaskTest(testing.TestCase):
    def test_a_translation_step_counts_both_sides(self):
        task = tiny_translation.trainer().task
        batch = tiny_translation.batch(0)
        specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
        rows, length = batch["source_ids"].shape
        shape = TokenShape(rows, length, memory_length=length)
        self.assertEqual(task.token_shape(specs), shape)
        self.assertEqual(task.tokens(specs), 2 * rows * length)
        self.assertEqual(task.target_tokens(specs), rows * length)
        self.assertEqual(step_flops(task, specs), FORWARD_AND_BACKWARD * flops(task, shape))
        self.assertEqual(
            task.id_ranges(), dict.fromkeys(("source_ids", "target_inputs", "target_labels"), 32)
        )

    def test_a_task_without_sequences_has_one_position_per_row(self):
        params = tiny.experiment_params()
        task = params.task.instantiate()
        specs = params.input.cls.batch_specs(params.input)
        self.assertEqual(task.token_shape(specs), TokenShape(16, 1))
        self.assertEqual(task.tokens(specs), task.target_tokens(specs))
        self.assertEqual(task.target_tokens(specs), 16)

    def test_vocabulary_sizes_of_zero_are_taken_from_the_input(self):
        params = TranslationTask.params().set(target_vocabulary_size=7)
        sized = TranslationTask.with_vocabulary_sizes(params, {"source": 5, "target": 6})
        self.assertEqual((sized.source_vocabulary_size, sized.target_vocabulary_size), (5, 7))
        self.assertEqual(params.source_vocabulary_size, 0)
        self.assertEqual(Task.with_vocabulary_sizes(Task.params(), {"text": 5}), Task.params())

    def test_rejects_an_input_without_the_vocabulary(self):
        message = r"task.vocabulary_size is 0 .* no vocabulary 'text' .* \(it has source\)"
        with self.assertRaisesRegex(ValueError, message):
            LanguageModelTask.with_vocabulary_sizes(LanguageModelTask.params(), {"source": 5})


if __name__ == "__main__":
    testing.main()
