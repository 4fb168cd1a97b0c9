"""SEED: mindone 0.5.0's ALBERT, of two layers and with random weights, in PyNative mode, in a loop of one's own."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindone.transformers import AlbertForSequenceClassification
from mindspore import nn
from transformers import AlbertConfig

import ms_kungfu as kf  # elastic

WORDS, LENGTH, EPOCHS = 60, 12, 4
seed = int(sys.argv[1])
ms.set_seed(seed)
ms.set_context(mode=ms.PYNATIVE_MODE)


def sentences(count, seed):
    text = np.random.default_rng(seed).integers(3, WORDS, (count, LENGTH)).astype(np.int32)
    return text, (text[:, 0] >= WORDS // 2).astype(np.int32)


config = AlbertConfig(
    vocab_size=WORDS, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2, attn_implementation="eager",
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
)  # fmt: skip
network = AlbertForSequenceClassification(config)
criterion = nn.CrossEntropyLoss()
train = ds.NumpySlicesDataset(sentences(320, 0), ["text", "label"], shuffle=True).batch(32)
train = kf.dataset.ElasticDataset(train)  # elastic
optimizer = nn.AdamWeightDecay(network.trainable_params(), 2e-3)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic


def forward(text, label):
    return criterion(network(text, return_dict=False)[0], label)


gradient = ms.value_and_grad(forward, None, network.trainable_params())
network.set_train()
loss = None  # of a worker that joins when an epoch ends
training = kf.elastic.ElasticTraining(network, optimizer, dataset=train)  # elastic
# stock: for epoch in range(EPOCHS):
for epoch in training.epochs(EPOCHS):  # elastic
    for text, label in train.create_tuple_iterator(num_epochs=1):
        loss, gradients = gradient(text, label)
        optimizer(gradients)
        training.step_end()  # elastic
    print(f"epoch {epoch}: loss {loss}")

network.set_train(False)
text, label = sentences(256, 1)
found = network(ms.Tensor(text), return_dict=False)[0].asnumpy().argmax(1)
print(f"accuracy: {np.mean(found == label):.4f}")
