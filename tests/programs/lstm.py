"""SEED: an LSTM that classifies sequences of several lengths, padded to one, in a loop of one's own, compiled."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.dataset import transforms

import ms_kungfu as kf  # elastic

WORDS, LONGEST, EPOCHS = 40, 16, 8
ms.set_seed(int(sys.argv[1]))
ms.set_context(mode=ms.GRAPH_MODE)


class Reviews:
    """Good ones have more words of the upper half."""

    def __init__(self, count, seed):
        draw = np.random.default_rng(seed)
        self.texts = [draw.integers(1, WORDS, draw.integers(5, LONGEST + 1)).astype(np.int32) for _ in range(count)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return text, np.array([np.mean(text > WORDS // 2) > 0.5], np.float32)


def loader(reviews, **options):
    dataset = ds.GeneratorDataset(reviews, ["text", "label"], **options)
    return dataset.map(transforms.PadEnd([LONGEST], 0), "text").batch(32)


class Sentiment(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.head = nn.Dense(32, 1)

    def construct(self, text):
        output, _ = self.rnn(self.embedding(text))
        return self.head(output.mean(axis=1))


train = loader(Reviews(1024, 0), shuffle=True)
train = kf.dataset.ElasticDataset(train)  # elastic
network = Sentiment()
optimizer = nn.Adam(network.trainable_params(), 5e-3)
optimizer = kf.optimizers.SynchronousSGDOptimizer(optimizer)  # elastic
criterion = nn.BCEWithLogitsLoss()


def forward(text, label):
    return criterion(network(text), label)


gradient = ms.value_and_grad(forward, None, network.trainable_params())


@ms.jit
def train_step(text, label):
    loss, gradients = gradient(text, label)
    optimizer(gradients)
    return loss


loss = None  # of a worker that joins when an epoch ends
training = kf.elastic.ElasticTraining(network, optimizer, dataset=train)  # elastic
# stock: for epoch in range(EPOCHS):
for epoch in training.epochs(EPOCHS):  # elastic
    for text, label in train.create_tuple_iterator(num_epochs=1):
        loss = train_step(text, label)
        training.step_end()  # elastic
    print(f"epoch {epoch}: loss {loss}")

right = [
    (network(text).asnumpy() > 0) == label.asnumpy()
    for text, label in loader(Reviews(512, 1), shuffle=False).create_tuple_iterator(num_epochs=1)
]
print(f"accuracy: {np.concatenate(right).mean():.4f}")
